package apiserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd/api"
	inference "sigs.k8s.io/gateway-api-inference-extension/api/v1"

	"kvepp/test/harness/process"
)

// Apply applies a manifest of YAML or JSON documents, as kubectl apply --server-side does. Objects without a namespace
// go into the given one. Apply creates missing namespaces. The server rejects fields that it does not know.
func (s *Server) Apply(ctx context.Context, namespace, manifest string) error {
	return s.each(
		manifest,
		namespace,
		func(object *unstructured.Unstructured, resource dynamic.ResourceInterface) error {
			if err := s.namespace(ctx, object.GetNamespace()); err != nil {
				return err
			}
			text, err := object.MarshalJSON()
			if err != nil {
				return err
			}
			// Use a patch, because the dynamic client's Apply cannot request field validation.
			force := true
			_, err = resource.Patch(ctx, object.GetName(), "application/apply-patch+yaml", text,
				metav1.PatchOptions{FieldManager: "test", Force: &force, FieldValidation: metav1.FieldValidationStrict})
			return err
		},
	)
}

// Delete deletes the objects of a manifest without a grace period. A missing object is no error.
func (s *Server) Delete(ctx context.Context, namespace, manifest string) error {
	return s.each(
		manifest,
		namespace,
		func(object *unstructured.Unstructured, resource dynamic.ResourceInterface) error {
			if err := resource.Delete(ctx, object.GetName(), *metav1.NewDeleteOptions(0)); !apierrors.IsNotFound(err) {
				return err
			}
			return nil
		},
	)
}

// each calls f with each object of a manifest, in order, and with the client that can change it.
func (s *Server) each(
	manifest, namespace string,
	f func(*unstructured.Unstructured, dynamic.ResourceInterface) error,
) error {
	for documents := yaml.NewYAMLOrJSONDecoder(strings.NewReader(manifest), 4096); ; {
		object := &unstructured.Unstructured{}
		if err := documents.Decode(&object.Object); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("apiserver: a manifest: %w", err)
		}
		if len(object.Object) == 0 {
			continue // only comments
		}
		kind := object.GroupVersionKind()
		mapping, err := s.mapper.RESTMapping(kind.GroupKind(), kind.Version)
		if err != nil {
			return fmt.Errorf("apiserver: %s: %w", kind, err)
		}
		var resource dynamic.ResourceInterface = s.Dynamic.Resource(mapping.Resource)
		if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
			if object.GetNamespace() == "" {
				object.SetNamespace(namespace)
			}
			resource = s.Dynamic.Resource(mapping.Resource).Namespace(object.GetNamespace())
		}
		if err := f(object, resource); err != nil {
			return fmt.Errorf("apiserver: %s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
}

// namespace creates a namespace unless it exists.
func (s *Server) namespace(ctx context.Context, name string) error {
	if name == "" || name == metav1.NamespaceDefault {
		return nil
	}
	_, err := s.Client.CoreV1().Namespaces().Create(
		ctx,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{},
	)
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// InferencePoolCRD returns the manifest of InferencePool, from the module that has its Go types.
func InferencePoolCRD() (string, error) {
	var errs bytes.Buffer
	list := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api-inference-extension")
	list.Stderr = &errs
	dir, err := list.Output()
	if err != nil {
		return "", fmt.Errorf("apiserver: find InferencePool's module: %w: %s", err, &errs)
	}
	text, err := os.ReadFile(
		filepath.Join(strings.TrimSpace(string(dir)), "config/crd/bases", inference.GroupName+"_inferencepools.yaml"),
	)
	return string(text), err
}

// ApplyCRD applies a manifest of one CustomResourceDefinition and waits until objects of its kind can be created.
func (s *Server) ApplyCRD(ctx context.Context, manifest string) error {
	if err := s.Apply(ctx, "", manifest); err != nil {
		return err
	}
	return s.each(manifest, "", func(object *unstructured.Unstructured, _ dynamic.ResourceInterface) error {
		group, _, _ := unstructured.NestedString(object.Object, "spec", "group")
		kind, _, _ := unstructured.NestedString(object.Object, "spec", "names", "kind")
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		return process.Until(ctx, func() error {
			s.mapper.Reset() // the mapper caches kinds that were missing
			mapping, err := s.mapper.RESTMapping(schema.GroupKind{Group: group, Kind: kind})
			if err != nil {
				return err
			}
			_, err = s.Dynamic.Resource(mapping.Resource).List(ctx, metav1.ListOptions{Limit: 1})
			return err
		})
	})
}

// AccountKubeconfig writes the kubeconfig of a service account, with a token that is valid for an hour, and returns the
// file. It creates the account if it is missing. Its rights are the roles that Apply creates.
func (s *Server) AccountKubeconfig(ctx context.Context, namespace, account string) (string, error) {
	if err := s.namespace(ctx, namespace); err != nil {
		return "", err
	}
	accounts := s.Client.CoreV1().ServiceAccounts(namespace)
	_, err := accounts.Create(
		ctx,
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}},
		metav1.CreateOptions{},
	)
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return "", err
	}
	seconds := int64(3600)
	token, err := accounts.CreateToken(
		ctx,
		account,
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds}},
		metav1.CreateOptions{},
	)
	if err != nil {
		return "", err
	}
	file := filepath.Join(s.dir, namespace+"-"+account+".kubeconfig")
	return file, s.writeKubeconfig(file, namespace, &api.AuthInfo{Token: token.Status.Token})
}
